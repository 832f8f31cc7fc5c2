"""``python -m rawattn.check``."""

from rawattn.check.cli import main

if __name__ == "__main__":
    main()
