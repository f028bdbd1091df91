"""VaultGemma: Gemma 2 without the norms after attention and MLP."""

from layerparity.anatomy.families import gemma2
from layerparity.anatomy.family import Family

FAMILY = Family("vaultgemma", after=gemma2.FAMILY.after, attention=gemma2.FAMILY.attention)
