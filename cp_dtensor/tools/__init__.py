"""Command-line tools. They need the extra `[tools]`; the library never imports them."""
