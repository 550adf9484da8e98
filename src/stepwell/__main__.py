"""`python -m stepwell`."""

import sys

from stepwell.cli import main

sys.exit(main())
