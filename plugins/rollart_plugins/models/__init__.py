"""``rollart model``: create models, and check which parts of RollArt can use one."""
