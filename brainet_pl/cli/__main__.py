"""`python -m brainet_pl.cli` is `brainet`."""

from brainet_pl.cli.commands import console

if __name__ == "__main__":
    console()
