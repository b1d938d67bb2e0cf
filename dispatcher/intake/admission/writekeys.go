package admission

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/writekey"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// MetaStore is the part of queue.Store that keeps the entries of write keys.
type MetaStore interface {
	PutMeta(name string, value []byte) error
	AllMeta() (map[string][]byte, error)
}

// keyPrefix is the prefix of the names under which the store keeps the entries of write keys. Known
// keys are stored as well, so that a key that is removed while the dispatcher is stopped is a
// removed key, not an unknown one, at the next start.
const keyPrefix = "writekey/"

// recoverKeys reads the entries of an earlier run.
func recoverKeys(log *slog.Logger, grace time.Duration, meta MetaStore) writekey.Book {
	entries := map[writekey.Hash]writekey.Entry{}
	all, err := meta.AllMeta()
	if err != nil {
		log.Warn("reading removed write keys failed; calls with them are answered 401", "error", err)
	}
	for name, value := range all {
		text, ok := strings.CutPrefix(name, keyPrefix)
		var hash writekey.Hash
		var entry writekey.Entry
		if !ok || len(text) != hex.EncodedLen(len(hash)) || json.Unmarshal(value, &entry) != nil {
			continue
		}
		if _, err := hex.Decode(hash[:], []byte(text)); err == nil {
			entries[hash] = entry
		}
	}
	return writekey.NewBook(grace, entries)
}

// maxLoggedKeys bounds the log lines of one config change.
const maxLoggedKeys = 20

// followKeys stores changed entries and logs removed and restored keys.
func (c *Configs) followKeys(changes []writekey.Change) {
	slices.SortFunc(changes, func(a, b writekey.Change) int {
		return cmp.Or(strings.Compare(owner(a).Namespace, owner(b).Namespace), strings.Compare(owner(a).Source, owner(b).Source))
	})
	logged, failed := 0, error(nil)
	for _, change := range changes {
		var value []byte
		if change.After != (writekey.Entry{}) {
			value, _ = json.Marshal(change.After) // No field can fail to marshal.
		}
		hash := hex.EncodeToString(change.Hash[:])
		if err := c.meta.PutMeta(keyPrefix+hash, value); err != nil && !errors.Is(err, queue.ErrClosed) {
			failed = err
		}
		lost := change.Before.LostAt.IsZero() && !change.After.LostAt.IsZero()
		removed, restored := change.Before.Known() && change.After.Removed(), change.Before.Removed() && change.After.Known()
		if !removed && !restored && !lost {
			continue
		}
		if logged++; logged > maxLoggedKeys {
			continue
		}
		log := c.log.With("namespace", owner(change).Namespace, "source", owner(change).Source, "sha256", hash[:8])
		switch {
		case lost:
			log.Warn("write key missing in the live config, and not removed by its owner; calls with it are answered 503")
		case removed:
			log.Warn("write key removed; calls with it are answered 503, then 401", "until", c.keys.Until(change.After).UTC().Format(time.RFC3339))
		default:
			log.Info("write key restored; calls with it are accepted")
		}
	}
	if logged > maxLoggedKeys {
		c.log.Warn("more write keys removed or restored", "suppressed", logged-maxLoggedKeys)
	}
	if failed != nil {
		c.log.Warn("storing write keys failed; after a restart calls with removed keys are answered 401", "error", failed)
	}
}

// owner returns the Source of a changed key.
func owner(c writekey.Change) writekey.Owner {
	if c.After == (writekey.Entry{}) {
		return c.Before.Owner
	}
	return c.After.Owner
}
