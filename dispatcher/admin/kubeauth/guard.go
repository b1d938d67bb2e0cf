// Package kubeauth lets the API server authorize the callers of a dispatcher's admin listener, and
// of the operator's metrics: a TokenReview authenticates the bearer token, and a
// SubjectAccessReview authorizes the path as a non-resource URL, as metrics servers do. The
// listener's certificate is read from a Secret. The main types are Guard and Certificate.
package kubeauth

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/time/rate"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/kubernetes"

	"github.com/posthorn/posthorn/contract/adminapi"
)

const (
	// A permission is cached longer than a denial: permissions are removed rarely, and new
	// permissions should work soon.
	allowTTL, denyTTL = time.Minute, 10 * time.Second
	// For this long a token that was authenticated is exempt from the rate limit, so that invented
	// tokens do not delay known callers.
	knownTTL      = 10 * time.Minute
	maxRemembered = 4096
	maxTokenBytes = 16 << 10
	reviewTimeout = 5 * time.Second
	// reviewsPerSecond bounds the requests to the API server for callers without a cached answer.
	reviewsPerSecond, reviewsBurst = 20, 40
)

// credentialID is the key under which a TokenReview returns the id of a token that the API server's
// audit log has, too.
const credentialID = "authentication.kubernetes.io/credential-id"

// Guard authorizes requests.
type Guard struct {
	client  kubernetes.Interface
	log     *slog.Logger
	answers *cache.LRUExpireCache
	known   *cache.LRUExpireCache // hashes of tokens that were authenticated
	asking  singleflight.Group
	limit   *rate.Limiter
}

// answer is the cached result for a token and a path; it holds neither.
type answer struct {
	status int // 200, 401 or 403
	caller adminapi.Caller
}

// question is the key of a cached answer; it has the token's hash only.
type question struct {
	token      [sha256.Size]byte
	verb, path string
}

// New makes a Guard. The client needs permission to create TokenReviews and SubjectAccessReviews.
func New(client kubernetes.Interface, log *slog.Logger) *Guard {
	return newGuard(client, log, realClock{})
}

func newGuard(client kubernetes.Interface, log *slog.Logger, clock cache.Clock) *Guard {
	return &Guard{
		client: client, log: log, limit: rate.NewLimiter(reviewsPerSecond, reviewsBurst),
		answers: cache.NewLRUExpireCacheWithClock(maxRemembered, clock), known: cache.NewLRUExpireCacheWithClock(maxRemembered, clock),
	}
}

type realClock struct{}

func (realClock) Now() time.Time { return time.Now() }

// Wrap serves next to callers with permission in Kubernetes: the verb is the method in lower case,
// the path a non-resource URL. Other callers get 401 or 403, and 503 while the API server is
// unreachable.
func (g *Guard) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		token = strings.TrimSpace(token)
		if !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > maxTokenBytes {
			unauthorized(w)
			return
		}
		a, err := g.decide(r.Context(), token, strings.ToLower(r.Method), r.URL.Path)
		switch {
		case err != nil:
			g.log.Warn("authorizing an admin request failed", "path", route(r.URL.Path), "error", err)
			w.Header().Set("Retry-After", "1")
			http.Error(w, "the API server is unreachable, so the token cannot be verified; try again", http.StatusServiceUnavailable)
		case a.status == http.StatusUnauthorized:
			unauthorized(w)
		case a.status == http.StatusForbidden:
			http.Error(w, fmt.Sprintf("user %q may not %s %s: %s", a.caller.User, strings.ToLower(r.Method), r.URL.Path, advice(r.URL.Path)),
				http.StatusForbidden)
		default:
			next.ServeHTTP(w, r.WithContext(adminapi.WithCaller(r.Context(), a.caller)))
		}
	})
}

// advice names a role with the permission for a path.
func advice(path string) string {
	if path == adminapi.BackupPath {
		return "no ClusterRole of the chart includes it, because a backup contains all stored data; bind one with the verb post on the nonResourceURL " + path
	}
	if strings.HasPrefix(path, adminapi.BodiesPath+"/") {
		return "bind the ClusterRole posthorn-bodies, which permits reading message bodies"
	}
	return "bind the ClusterRole posthorn-support, or posthorn-metrics-reader for metrics alone"
}

func unauthorized(w http.ResponseWriter) {
	w.Header().Set("WWW-Authenticate", `Bearer realm="posthorn"`)
	http.Error(w, "a valid bearer token for this cluster is required", http.StatusUnauthorized)
}

// reviewed is the non-resource URL that is authorized: the path, but under another name for
// profiles, because the API server's own profiles have the same path and a permission for them must
// not include Posthorn's.
func reviewed(path string) string {
	if strings.HasPrefix(path, "/debug/") {
		return "/posthorn" + path
	}
	return path
}

// route removes the key of a message from a path.
func route(path string) string {
	for _, prefix := range []string{"/deadletters/", adminapi.BodiesPath + "/deadletters/"} {
		if strings.HasPrefix(path, prefix) {
			return prefix + "*"
		}
	}
	return path
}

// decide returns a cached answer, or asks the API server; equal concurrent questions share one
// request.
func (g *Guard) decide(ctx context.Context, token, verb, path string) (answer, error) {
	q := question{sha256.Sum256([]byte(token)), verb, path}
	if a, ok := g.answers.Get(q); ok {
		return a.(answer), nil
	}
	done := g.asking.DoChan(string(q.token[:])+verb+" "+path, func() (any, error) {
		// The caller's context would also cancel the question for other callers.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reviewTimeout)
		defer cancel()
		a, err := g.ask(ctx, q, token)
		if err != nil {
			return answer{}, err
		}
		ttl := denyTTL
		if a.status == http.StatusOK {
			ttl = allowTTL
			g.known.Add(q.token, nil, knownTTL)
		} else {
			g.known.Remove(q.token)
		}
		g.answers.Add(q, a, ttl)
		return a, nil
	})
	select {
	case result := <-done:
		return result.Val.(answer), result.Err
	case <-ctx.Done():
		return answer{}, ctx.Err()
	}
}

func (g *Guard) ask(ctx context.Context, q question, token string) (answer, error) {
	if _, known := g.known.Get(q.token); !known && g.limit.Wait(ctx) != nil {
		return answer{}, errors.New("too many requests with new tokens")
	}
	wanted := audiences(token)
	review, err := g.client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: wanted},
	}, metav1.CreateOptions{})
	if err != nil {
		return answer{}, fmt.Errorf("review a token: %w", err)
	}
	// An authenticator without support for audiences would accept any token.
	if !review.Status.Authenticated || (wanted != nil && !slices.Contains(review.Status.Audiences, adminapi.TokenAudience)) {
		return answer{status: http.StatusUnauthorized}, nil
	}
	user := review.Status.User
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for k, v := range user.Extra {
		extra[k] = authorizationv1.ExtraValue(v)
	}
	caller := adminapi.Caller{User: user.Username}
	if ids := user.Extra[credentialID]; len(ids) > 0 {
		caller.CredentialID = ids[0]
	}
	access, err := g.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Verb: q.verb, Path: reviewed(q.path)},
		},
	}, metav1.CreateOptions{})
	switch {
	case err != nil:
		return answer{}, fmt.Errorf("review access: %w", err)
	case !access.Status.Allowed:
		return answer{http.StatusForbidden, caller}, nil
	}
	return answer{http.StatusOK, caller}, nil
}

// audiences are the audiences to review a token for: Posthorn's if the token claims it, otherwise
// the API server's (nil), which monitoring uses. The claim is not trusted; the API server
// verifies it.
func audiences(token string) []string {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return nil
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return nil
	}
	var claims struct {
		Audience json.RawMessage `json:"aud"`
	}
	if json.Unmarshal(payload, &claims) != nil {
		return nil
	}
	var one string
	var many []string
	if json.Unmarshal(claims.Audience, &one) == nil {
		many = []string{one}
	} else if json.Unmarshal(claims.Audience, &many) != nil {
		return nil
	}
	if slices.Contains(many, adminapi.TokenAudience) {
		return []string{adminapi.TokenAudience}
	}
	return nil
}
