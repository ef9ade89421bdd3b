"""Markup, charts, tables, pages: how things are drawn, whatever they say."""
