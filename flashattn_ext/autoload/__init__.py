"""Loads flashattn_ext at the end of `import torch` where FLASHATTN_EXT_ENABLE asks for it.

torch calls load() in every program, as the entry point "torch.backends" of pyproject.toml says. So
this module stands outside of the package: without the variable nothing of it is imported.
"""

import os


def load():
    if os.environ.get("FLASHATTN_EXT_ENABLE", "").strip() not in ("", "0"):
        import flashattn_ext  # noqa: F401  (it reads the variable too)
