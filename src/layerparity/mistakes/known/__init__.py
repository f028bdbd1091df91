"""Known bugs, one file each: FAULT plants it, RULE recognises it; either may be missing."""
