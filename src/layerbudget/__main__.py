"""``python -m layerbudget``."""

import sys

from .cli import main

sys.exit(main())
