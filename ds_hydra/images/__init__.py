"""Images in: models of text whose tokens may stand for rows of images."""
