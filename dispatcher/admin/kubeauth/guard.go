// Package kubeauth lets the API server decide who may use a dispatcher's admin
// listener, or read the operator's metrics: a bearer token is authenticated by a
// TokenReview and authorised by a SubjectAccessReview of the path as a
// non-resource URL, as metrics servers do.
// The listener's certificate comes from a Secret.
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

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const (
	// A yes is remembered longer than a no: rights are taken away seldom, and who
	// was just given them should not wait.
	allowTTL, denyTTL = time.Minute, 10 * time.Second
	// Whose token was let in is not held up, for so long, by those who make up tokens.
	knownTTL      = 10 * time.Minute
	maxRemembered = 4096
	maxTokenBytes = 16 << 10
	reviewTimeout = 5 * time.Second
	// reviewsPerSecond bounds what callers without a remembered answer cost the API server.
	reviewsPerSecond, reviewsBurst = 20, 40
)

// Guard decides about requests.
type Guard struct {
	client  kubernetes.Interface
	log     *slog.Logger
	answers *cache.LRUExpireCache
	known   *cache.LRUExpireCache // hashes of tokens that were let in
	asking  singleflight.Group
	limit   *rate.Limiter
}

// answer is what is remembered of a token and a path; it holds neither.
type answer struct {
	status int // 200, 401 or 403
	user   string
}

// question is what is asked; its token is known by its hash only.
type question struct {
	token      [sha256.Size]byte
	verb, path string
}

// New makes a Guard. The client needs the right to create TokenReviews and SubjectAccessReviews.
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

// Wrap serves next to callers whom Kubernetes allows the request: the verb is
// the method in lower case, the path a non-resource URL. Others get 401 or 403,
// and 503 while the API server cannot be asked.
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
			g.log.Warn("an admin request could not be authorised", "path", route(r.URL.Path), "error", err)
			w.Header().Set("Retry-After", "1")
			http.Error(w, "the API server could not be asked who you are; try again", http.StatusServiceUnavailable)
		case a.status == http.StatusUnauthorized:
			unauthorized(w)
		case a.status == http.StatusForbidden:
			http.Error(w, fmt.Sprintf("user %q may not %s %s: bind the ClusterRole posthorn-support, or posthorn-metrics-reader for metrics alone", a.user, strings.ToLower(r.Method), r.URL.Path), http.StatusForbidden)
		default:
			next.ServeHTTP(w, r)
		}
	})
}

func unauthorized(w http.ResponseWriter) {
	w.Header().Set("WWW-Authenticate", `Bearer realm="posthorn"`)
	http.Error(w, "a bearer token that this cluster's API server knows is needed", http.StatusUnauthorized)
}

// reviewed is the non-resource URL whose right is asked for: the path, but not where
// the API server serves its own profiles, which nobody gets with the right to ours.
func reviewed(path string) string {
	if strings.HasPrefix(path, "/debug/") {
		return "/posthorn" + path
	}
	return path
}

// route is a path without what tells of a message.
func route(path string) string {
	if strings.HasPrefix(path, "/deadletters/") {
		return "/deadletters/*"
	}
	return path
}

// decide answers from memory, or asks the API server; equal questions at once are one.
func (g *Guard) decide(ctx context.Context, token, verb, path string) (answer, error) {
	q := question{sha256.Sum256([]byte(token)), verb, path}
	if a, ok := g.answers.Get(q); ok {
		return a.(answer), nil
	}
	done := g.asking.DoChan(string(q.token[:])+verb+" "+path, func() (any, error) {
		// Not the caller's context: others may wait for the same answer.
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
	// An authenticator that knows nothing of audiences would take any token for ours.
	if !review.Status.Authenticated || (wanted != nil && !slices.Contains(review.Status.Audiences, liveconfig.AdminAudience)) {
		return answer{status: http.StatusUnauthorized}, nil
	}
	user := review.Status.User
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for k, v := range user.Extra {
		extra[k] = authorizationv1.ExtraValue(v)
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
		return answer{http.StatusForbidden, user.Username}, nil
	}
	return answer{http.StatusOK, user.Username}, nil
}

// audiences are those to review a token for: ours when the token claims to be
// meant for us, else those of the API server (nil), whose tokens monitoring
// uses. The claim is not believed, only repeated to the API server.
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
	if slices.Contains(many, liveconfig.AdminAudience) {
		return []string{liveconfig.AdminAudience}
	}
	return nil
}
