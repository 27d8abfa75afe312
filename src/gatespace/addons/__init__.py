"""Add-ons: optional capabilities, one folder each. The core finds them by entry points and imports none of them."""
