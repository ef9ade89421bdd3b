"""A dry run: the packs of one's own data planned, and its page."""
