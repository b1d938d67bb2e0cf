// Package peer sends the requests that a standby gets to the owner of the slot.
//
//	client -> standby: Forwarder -> TLS -> Handler: owner -> the handler of calls or of the admin API
//
// Each process makes a certificate and a token at its start, and announces them with its address to the users of the
// log, so a process that can read the log, and with it all messages, can send requests to
// the owner; no other one can. The owner decides everything about a request, also whether its client may
// send it to the admin API; the standby sends it once, and never one that another process has forwarded.
package peer

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net/http"
	"time"

	"github.com/posthorn/posthorn/contract/writekey"
)

const (
	// tokenHeader proves that a request is of a process that can read the log. clientHeader is the
	// address of the client, and adminHeader marks the requests to the admin API. All are removed before the
	// request is handled.
	tokenHeader  = "Posthorn-Peer-Token"
	clientHeader = "Posthorn-Peer-Client"
	adminHeader  = "Posthorn-Peer-Admin"
	// streamHeader has the format of a stream, and is removed from the requests of clients.
	streamHeader = "Posthorn-Peer-Stream"
	// slotHeader is the slot of the request.
	slotHeader = "Posthorn-Peer-Slot"
	// HeaderBytes bounds the size of these headers.
	HeaderBytes = 384
	// serverName is the name in the certificates.
	serverName = "owner.posthorn.internal"
	// lifetime of a certificate; a process makes one at its start.
	lifetime = 100 * 365 * 24 * time.Hour
)

// Announcement is how other processes reach the owner.
type Announcement struct {
	// Pod is the name of the process, and Address its HOST:PORT for the requests of others. They may be the same.
	Pod     string `json:"pod"`
	Address string `json:"address"`
	// Certificate is the server's, in DER.
	Certificate []byte `json:"certificate"`
	// Token authorizes requests.
	Token string `json:"token"`
}

// LogValue implements slog.LogValuer without the token.
func (a Announcement) LogValue() slog.Value { return slog.StringValue(a.String()) }

// String returns the pod and the address.
func (a Announcement) String() string {
	if a.Pod == a.Address {
		return a.Address
	}
	return a.Pod + " (" + a.Address + ")"
}

// GoString implements fmt.GoStringer without the token.
func (a Announcement) GoString() string { return a.String() }

// Identity is the certificate and the token of this process.
type Identity struct {
	announcement Announcement
	certificate  tls.Certificate
}

// NewIdentity makes the identity of a process. The other processes reach it at address, HOST:PORT.
func NewIdentity(pod, address string) (*Identity, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the key for other processes: %w", err)
	}
	now := time.Now()
	// The names and the validity are the same in all processes: the certificate itself is compared.
	template := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), Subject: pkix.Name{CommonName: serverName}, DNSNames: []string{serverName},
		NotBefore: now.Add(-lifetime), NotAfter: now.Add(lifetime),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make the certificate for other processes: %w", err)
	}
	return &Identity{
		Announcement{Pod: pod, Address: address, Certificate: der, Token: rand.Text()},
		tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key},
	}, nil
}

// ID is another one for each identity. It is public.
func (i *Identity) ID() string {
	hash := sha256.Sum256(i.announcement.Certificate)
	return hex.EncodeToString(hash[:8])
}

// Announce returns the text for the other processes.
func (i *Identity) Announce() []byte {
	text, _ := json.Marshal(i.announcement) // Strings and bytes always marshal.
	return text
}

// Config configures the server for other processes.
func (i *Identity) Config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{i.certificate}}
}

// Misdirected answers the requests of other processes while this one does not own the slot.
func Misdirected(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, "this process does not own the slot", http.StatusMisdirectedRequest)
}

// TakeSlot returns the slot of a request that Handler has admitted, and removes it from the request.
func TakeSlot(r *http.Request) string {
	slot := r.Header.Get(slotHeader)
	r.Header.Del(slotHeader)
	return slot
}

// Handlers handle the requests of other processes.
type Handlers struct {
	Calls http.Handler
	// Admin authorizes the requests to the admin API, as for its own clients.
	Admin http.Handler
	// Namespace returns the namespace of a write key; nil knows none.
	Namespace func(writekey.Hash) (namespace string, ok bool)
}

// Handler returns a handler of the requests of other processes.
func (i *Identity) Handler(to Handlers, log *slog.Logger) *Handler {
	return &Handler{identity: i, to: to, log: log, stopping: make(chan struct{})}
}

// decode returns the announcement in a record of the log.
func decode(text []byte) (a Announcement, pool *x509.CertPool, err error) {
	if err := json.Unmarshal(text, &a); err != nil {
		return a, nil, fmt.Errorf("decode the announcement of the owner: %w", err)
	}
	certificate, err := x509.ParseCertificate(a.Certificate)
	if err != nil {
		return a, nil, fmt.Errorf("decode the certificate of the owner: %w", err)
	}
	if a.Address == "" || a.Token == "" {
		return a, nil, errors.New("the announcement of the owner has no address or no token")
	}
	pool = x509.NewCertPool()
	pool.AddCert(certificate)
	return a, pool, nil
}
