"""The tensor plane: values and weights from process to process. Only files that say so need no torch."""
