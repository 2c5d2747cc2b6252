"""What a run's folder and a trained model are: found, checked, claimed, written and read here."""
