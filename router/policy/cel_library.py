"""The package `cel` without its command line, which it imports as a whole and which no process of ours runs.

That command line brings rich, prompt_toolkit, pygments and typer: a quarter of a second at each start of a process.
"""

import sys
from types import ModuleType

_LEFT_OUT = "cel.cli"

sys.modules[_LEFT_OUT] = ModuleType(_LEFT_OUT)
try:
    import cel
finally:
    del sys.modules[_LEFT_OUT]

__all__ = ["cel"]
