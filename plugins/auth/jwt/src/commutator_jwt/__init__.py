"""The authenticator `jwt`: bearer tokens of an issuer, checked with PyJWT."""
