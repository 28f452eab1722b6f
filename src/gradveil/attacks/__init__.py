"""What an attacker does with the updates that the server saw."""
