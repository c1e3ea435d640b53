"""The components in the box. They import core alone, and are found through entry points like anybody's."""
