"""Put this folder's helpers on the path (tests are imported by path)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
