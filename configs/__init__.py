"""Configuration groups (YAML data): engine presets, subjects, models, sweeps and ablations. No code lives here."""
