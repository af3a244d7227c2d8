// Stage number -> what it shows of a request: figure(record) beside its name, view(record) below.
import * as attend from "./attend.js";
import * as cache from "./cache.js";
import * as decode from "./decode.js";
import * as embed from "./embed.js";
import * as prefill from "./prefill.js";
import * as prepare from "./prepare.js";
import * as route from "./route.js";
import * as sample from "./sample.js";
import * as schedule from "./schedule.js";
import * as stream from "./stream.js";
import * as tokenize from "./tokenize.js";

export const VIEWS = {
  1: route,
  2: prepare,
  3: tokenize,
  4: embed,
  5: schedule,
  6: prefill,
  7: cache,
  8: attend,
  9: decode,
  10: sample,
  11: stream,
};
