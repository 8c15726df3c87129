"""The store's facts as plain values: records, owners and their transitions, limits. Imports no other room."""
