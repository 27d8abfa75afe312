"""What the paper prints, copied from its tables by hand."""

from __future__ import annotations

ACCURACIES = {
    "emotion": {
        "G4": (7734, 7685, 7671), "G5": (7748, 7635, 7847), "H2": (7847, 7734, 7706), "HG5,d+4": (7868, 7713, 7706),
        "entropy-only(-4)": (7671, 7769, 7657), "static0.388": (7727, 7727, 7692),
    },
    "hate": {
        "G4": (5586, 5239, 5444), "G5": (5286, 5296, 5529), "H1": (5549, 5360, 5283), "H2": (5411, 5488, 5525),
        "HG4,d+2": (5209, 5357, 5266), "entropy-only(-4)": (5128, 5350, 5195), "gap-only(+2)": (5387, 5377, 5283),
        "static0.556": (5202, 5444, 5195),
    },
    "offensive": {
        "G2": (7721, 7651, 7698), "H1": (7814, 7791, 7488), "entropy-only(-4)": (7581, 7698, 7558),
        "gap-only(+2)": (7674, 7616, 7523), "static0.574": (7581, 7547, 7581),
    },
}  # fmt: skip
"""Table 3seed-percfg × 10⁴, seeds 42, 2, 3."""

NINE = [
    ("restriction", "hate", "H1", "entropy-only(-4)", 4.21, 1.73, 2.18, -3.69, 7.15, 0.30),
    ("restriction", "hate", "HG4,d+2", "gap-only(+2)", -1.78, -0.72, 0.92, -3.00, 1.57, 0.31),
    ("restriction", "emotion", "HG5,d+4", "entropy-only(-4)", 1.97, 0.63, 1.27, -2.52, 3.79, 0.48),
    ("restriction", "offensive", "H1", "entropy-only(-4)", 2.33, 0.85, 1.52, -2.91, 4.62, 0.43),
    ("restriction", "offensive", "H1", "gap-only(+2)", 1.40, 0.93, 1.13, -1.86, 3.73, 0.29),
    ("restriction", "offensive", "G2", "entropy-only(-4)", 1.40, 0.78, 1.08, -1.91, 3.46, 0.34),
    ("isolation", "hate", "G4", "static0.556", 3.84, 1.43, 3.09, -6.24, 9.09, 0.51),
    ("isolation", "emotion", "HG5,d+4", "static0.388", 1.41, 0.47, 0.83, -1.58, 2.52, 0.43),
    ("isolation", "offensive", "H1", "static0.574", 2.33, 1.28, 1.91, -3.48, 6.04, 0.37),
]
