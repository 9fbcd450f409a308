"""What users do to a model, its data and its loss, tried by the whole engine against one process of plain torch."""
