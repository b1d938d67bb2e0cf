package event

import "bytes"

// Integrations is a call's integrations object: its selection of destinations. The zero value
// selects all.
type Integrations struct {
	object []byte // canonical JSON, part of the call's body
}

// Allows reports whether the call may be sent to a destination. names are the names by which a call
// can select it, the most specific one last; they are case-sensitive. The entry for the most
// specific name with an entry decides, then the entry "All"; without either the call may be sent.
// An entry is false, true or an object of options, which means true; other values are ignored.
//
// "all" replaces a missing "All": the vendor's Go client, version 3, writes it in lower case.
func (i Integrations) Allows(names ...string) bool {
	if len(i.object) == 0 {
		return true
	}
	const (
		none    = -2 // no entry so far
		lowered = -1 // "all"
		all     = 0  // 1 is the first name, 2 the second, ...
	)
	allowed, rank := true, none
	var buf [64]byte
	for k, v := range membersOf(i.object) {
		enabled := true
		switch i.object[v.from] {
		case 't', '{':
		case 'f':
			enabled = false
		default:
			continue
		}
		key := i.object[k.from+1 : k.to-1]
		if bytes.IndexByte(key, '\\') >= 0 {
			key = appendDecoded(buf[:0], i.object[k.from:k.to])
		}
		if rank <= all && string(key) == "All" {
			allowed, rank = enabled, all
		}
		if rank <= lowered && string(key) == "all" {
			allowed, rank = enabled, lowered
		}
		for n := len(names); n > 0 && n > rank; n-- {
			if string(key) == names[n-1] {
				allowed, rank = enabled, n
			}
		}
	}
	return allowed
}
