"""``python -m octavo``: the same as the ``octavo`` command."""

import sys

from .serving.cli import main

if __name__ == "__main__":
    sys.exit(main())
