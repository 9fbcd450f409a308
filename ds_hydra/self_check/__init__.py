"""Before step 0: does training this model under these strategies equal one process's training? A small copy tells."""
