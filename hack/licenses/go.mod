// The generator of THIRD_PARTY_LICENSES.md is a module of its own, so that Posthorn
// does not depend on the classifier of licences.
module github.com/posthorn/posthorn/hack/licenses

go 1.26.0

require github.com/google/licensecheck v0.3.1
