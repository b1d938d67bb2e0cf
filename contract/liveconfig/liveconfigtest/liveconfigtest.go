// Package liveconfigtest has live configs for tests.
package liveconfigtest

import (
	"crypto/sha256"
	"encoding/hex"
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// Key is the write key of Config.
const Key = "write-key"

// Config returns a config of namespace shop: the Source web, and the destination crm with one endpoint.
func Config(url string) liveconfig.Config {
	sum := sha256.Sum256([]byte(Key))
	return liveconfig.Config{
		Version: liveconfig.FormatVersion, Namespace: "shop",
		Sources: []liveconfig.Source{{Name: "web", Generation: 1, Revision: "s1",
			WriteKeySHA256: liveconfig.KeyHashes{hex.EncodeToString(sum[:])}}},
		Destinations: []liveconfig.Destination{{
			Name: "crm", Generation: 7, Revision: "d1", State: liveconfig.Active, Sources: []string{"web"},
			Endpoints:   []liveconfig.Endpoint{{Name: "primary", URL: liveconfig.NewSecret(url)}},
			Signing:     liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("shared")}},
			Success:     liveconfig.AnyEndpoint,
			Delivery:    liveconfig.Delivery{TimeoutMS: 60_000, RetryWindowMS: 3_600_000, MinBackoffMS: 10, MaxBackoffMS: 100, MaxInFlight: 8},
			DeadLetters: liveconfig.DeadLetters{RetentionMS: 3_600_000, MaxBytes: 1 << 20},
		}},
	}
}

// Encode encodes a config without a head.
func Encode(t testing.TB, c liveconfig.Config) liveconfig.Stored {
	t.Helper()
	data, _, err := liveconfig.Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	return liveconfig.Stored{Config: data}
}

// Numbered encodes a config with a head.
func Numbered(t testing.TB, number int64, c liveconfig.Config, tombstones ...liveconfig.Tombstone) liveconfig.Stored {
	t.Helper()
	stored := Encode(t, c)
	live, err := stored.Decode()
	if err != nil {
		t.Fatal(err)
	}
	if stored.Head, err = liveconfig.EncodeHead(liveconfig.Head{Number: number, Revision: live.Revision, Tombstones: tombstones}); err != nil {
		t.Fatal(err)
	}
	return stored
}
