package egress

import (
	"bytes"
	"container/list"
	"crypto/tls"
	"sync"
)

const (
	// maxSessionBytes bounds the TLS sessions of all pools.
	maxSessionBytes = 16 << 20
	// sessionOverhead is the memory of a session beside its encoded form, in bytes.
	sessionOverhead = 400
)

// sessions has the newest TLS session of each pool, so that a handshake resumes it. Above the bound it
// drops the session that was used longest ago. Sessions are encoded, because a decoded one keeps several
// copies of the receiver's certificate, and share the certificates of authorities.
type sessions struct {
	mu          sync.Mutex
	bound, used int                           // bytes
	of          map[poolKey]*list.Element     // of *session
	order       list.List                     // the one used longest ago first
	authorities map[string]*sharedCertificate // by their bytes
}

type session struct {
	key    poolKey
	ticket []byte
	parts  []string // of the encoded session: bytes of its own and certificates of authorities in turn
}

type sharedCertificate struct {
	der      string
	sessions int
}

func newSessions(bound int) *sessions {
	return &sessions{bound: bound, of: map[poolKey]*list.Element{}, authorities: map[string]*sharedCertificate{}}
}

// poolSession is the tls.ClientSessionCache of one pool.
type poolSession struct {
	all *sessions
	key poolKey
}

// Get implements tls.ClientSessionCache.
func (p poolSession) Get(string) (*tls.ClientSessionState, bool) {
	ticket, encoded := p.all.get(p.key)
	if encoded == nil {
		return nil, false
	}
	state, err := tls.ParseSessionState(encoded)
	if err != nil {
		return nil, false
	}
	cs, err := tls.NewResumptionState(ticket, state)
	return cs, err == nil
}

// Put implements tls.ClientSessionCache.
func (p poolSession) Put(_ string, cs *tls.ClientSessionState) {
	ticket, state, err := cs.ResumptionState()
	if err != nil || state == nil {
		p.all.drop(p.key)
		return
	}
	if encoded, err := state.Bytes(); err == nil {
		p.all.put(p.key, ticket, encoded)
	}
}

func (s *sessions) get(key poolKey) (ticket, encoded []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.of[key]
	if at == nil {
		return nil, nil
	}
	s.order.MoveToBack(at)
	found := at.Value.(*session)
	for _, part := range found.parts {
		encoded = append(encoded, part...)
	}
	return found.ticket, encoded
}

func (s *sessions) put(key poolKey, ticket, encoded []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(s.of[key])
	added := &session{key: key, ticket: bytes.Clone(ticket), parts: split(encoded)}
	for i, part := range added.parts {
		if i%2 == 1 {
			added.parts[i] = s.share(part)
		}
	}
	s.used += added.own()
	s.of[key] = s.order.PushBack(added)
	for s.used > s.bound {
		s.remove(s.order.Front())
	}
}

func (s *sessions) drop(key poolKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(s.of[key])
}

// remove removes a session, if there is one.
func (s *sessions) remove(at *list.Element) {
	if at == nil {
		return
	}
	removed := s.order.Remove(at).(*session)
	delete(s.of, removed.key)
	s.used -= removed.own()
	for i, part := range removed.parts {
		if i%2 == 0 {
			continue
		}
		if shared := s.authorities[part]; shared.sessions > 1 {
			shared.sessions--
		} else {
			delete(s.authorities, part)
			s.used -= len(part)
		}
	}
}

// share returns the stored copy of an authority's certificate for one more session.
func (s *sessions) share(der string) string {
	shared := s.authorities[der]
	if shared == nil {
		shared = &sharedCertificate{der: der}
		s.authorities[der] = shared
		s.used += len(der)
	}
	shared.sessions++
	return shared.der
}

// own is the memory of a session without shared certificates, in bytes.
func (s *session) own() int {
	n := sessionOverhead + len(s.ticket)
	for i := 0; i < len(s.parts); i += 2 {
		n += len(s.parts[i])
	}
	return n
}

// split divides an encoded session: each second part is the certificate of an authority. Without the first
// certificate, which is the receiver's, these are the bytes after the length of a certificate in three bytes that begin
// with a DER sequence of this length.
func split(encoded []byte) (parts []string) {
	start, first := 0, true
	for i := 3; i+4 <= len(encoded); i++ {
		length := int(encoded[i-3])<<16 | int(encoded[i-2])<<8 | int(encoded[i-1])
		if encoded[i] != 0x30 || encoded[i+1] != 0x82 || length != 4+(int(encoded[i+2])<<8|int(encoded[i+3])) || i+length > len(encoded) {
			continue
		}
		if !first {
			parts = append(parts, string(encoded[start:i]), string(encoded[i:i+length]))
			start = i + length
		}
		first = false
		i += length - 1
	}
	return append(parts, string(encoded[start:]))
}
