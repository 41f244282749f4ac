"""``octavo`` with ``fake_core.py`` for a core: ``python fake_core_serve.py serve ...``."""

import sys
from pathlib import Path

from octavo.engine import core_child
from octavo.serving.cli import main

core_child.core_command = lambda: [sys.executable, str(Path(__file__).with_name("fake_core.py"))]
sys.exit(main())
