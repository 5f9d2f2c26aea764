"""The templates of the pages that :mod:`rollart_registry.site` writes."""
