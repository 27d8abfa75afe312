"""Model cards, exported model folders, and pushing them to the Hub."""
