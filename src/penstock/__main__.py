"""`python -m penstock`: the command `penstock`."""

from penstock.runtime.cli.main import main

if __name__ == "__main__":
    main()
