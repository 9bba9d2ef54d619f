"""`python -m presage`: the command line."""

from presage.cli import main

if __name__ == "__main__":
    main()
