"""Search: from comparisons to the first wrong place, or the fewest keys that make it wrong."""
