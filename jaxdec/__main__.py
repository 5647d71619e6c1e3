"""``python -m jaxdec`` is the `jaxdec` command."""

from jaxdec.cli import main

if __name__ == "__main__":
    main()
