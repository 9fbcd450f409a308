"""What layers compute in chains of many small operators, as functions of few that keep less for the backward."""
