"""``python -m paceline`` runs the command `paceline`."""

import sys

from paceline._cli import main

if __name__ == "__main__":
    sys.exit(main())
