"""Add-ons: optional capabilities, one folder each. The core finds them through entry points and imports none of them."""
