"""Our objectives inside other people's trainers. Each needs an extra of its own, so nothing is imported here."""
