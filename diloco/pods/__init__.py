"""What the verbs about pods have in common: where pods are written down, and how they are shown."""
