"""`python -m rowmesh.cli`."""

from rowmesh.cli import main

if __name__ == "__main__":
    main()
