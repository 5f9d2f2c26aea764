"""The templates of the pages that :mod:`rollart_core.community.site` writes."""
