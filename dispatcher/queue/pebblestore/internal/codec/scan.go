package codec

import (
	"github.com/cockroachdb/pebble/v2"
)

// Scan calls fn for every key that begins with prefix, in order. The key and the value are valid
// only during the call.
func Scan(r pebble.Reader, prefix []byte, fn func(k, v []byte) error) error {
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: prefix, UpperBound: EndOf(prefix)})
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }()
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err == nil {
			err = fn(it.Key(), v)
		}
		if err != nil {
			return err
		}
	}
	return it.Error()
}
