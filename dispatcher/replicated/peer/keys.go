package peer

import (
	"encoding/hex"
	"net/http"
	"sync"

	"github.com/posthorn/posthorn/contract/writekey"
)

const (
	// keyHeader asks the owner for the namespace of a write key, by its hash, and namespaceHeader is its answer.
	keyHeader       = "Posthorn-Peer-Key"
	namespaceHeader = "Posthorn-Peer-Namespace"
	// maxKeys bounds the keys that are known.
	maxKeys = 100_000
)

// knownKeys are the namespaces of write keys, as an owner named them: a standby has no live configs. It does not
// know invented keys. Its zero value is empty.
type knownKeys struct {
	mu         sync.RWMutex
	namespaces map[writekey.Hash]string
}

// namespace returns the namespace of a key, "" if it is not known.
func (k *knownKeys) namespace(key string) string {
	if key == "" {
		return ""
	}
	hash := writekey.HashOf(key)
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.namespaces[hash]
}

// ask adds the question for the namespace of an unknown key to a request.
func (k *knownKeys) ask(header http.Header, key string) {
	if key != "" && k.namespace(key) == "" {
		hash := writekey.HashOf(key)
		header.Set(keyHeader, hex.EncodeToString(hash[:]))
	}
}

// reply answers a question for the namespace of a key, and removes it from the request.
func (h Handlers) reply(answer, request http.Header) {
	text := request.Get(keyHeader)
	if text == "" {
		return
	}
	delete(request, keyHeader)
	var hash writekey.Hash
	if n, err := hex.Decode(hash[:], []byte(text)); err != nil || n != len(hash) || h.Namespace == nil {
		return
	}
	if namespace, ok := h.Namespace(hash); ok {
		answer.Set(namespaceHeader, namespace)
	}
}

// learn takes the namespace from an answer.
func (k *knownKeys) learn(header http.Header, key string) {
	namespace := header.Get(namespaceHeader)
	if namespace == "" {
		return
	}
	header.Del(namespaceHeader)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.namespaces == nil || len(k.namespaces) >= maxKeys {
		k.namespaces = map[writekey.Hash]string{}
	}
	k.namespaces[writekey.HashOf(key)] = namespace
}
