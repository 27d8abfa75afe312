"""The paper's published numbers: its tables recomputed, and an audit."""
