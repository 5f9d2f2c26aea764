"""The templates of the pages that :mod:`rollart_registry.operator` writes."""
