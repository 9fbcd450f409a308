"""All ranks of the job: process groups, texts and figures that every rank gets."""
