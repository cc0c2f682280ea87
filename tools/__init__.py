"""How what ships with localspec was made and measured. Nothing in `localspec` imports this.

Each tool is a command, `python -m tools.NAME`, and makes the environment first where it is missing.
"""

import sys

from localspec.__main__ import prepare

prepare(sys.orig_argv[1:])
