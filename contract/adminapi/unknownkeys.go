package adminapi

import (
	"context"
	"iter"
	"time"
)

// UnknownKey counts the requests of one address that were refused because of an unknown write key.
// It contains the sender's address, so it is neither in the report nor in the status of objects.
type UnknownKey struct {
	// Prefix holds the first letters of the key: at most four, and at most a quarter of the key. It
	// is empty for short keys, and for an address with many keys.
	Prefix string `json:"prefix,omitempty"`
	// Address is the IP address of the sender, or of its last proxy that is not trusted.
	Address  string    `json:"address,omitempty"`
	Requests int64     `json:"requests"`
	First    time.Time `json:"first"`
	Last     time.Time `json:"last"`
}

// UnknownKeys returns the unknown write keys of the last hour, those with the most requests first.
// The dispatcher keeps a bounded number of them in memory since its start.
func (c *Client) UnknownKeys(ctx context.Context) iter.Seq2[UnknownKey, error] {
	return lines[UnknownKey](ctx, c, "/unknownkeys")
}
