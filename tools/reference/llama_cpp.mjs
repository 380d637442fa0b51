// llama.cpp's own answer for a GGUF file: tokens of a prompt, greedy tokens, and the log-probability of each with its margin.
//
//     npm install node-llama-cpp          # anywhere; it carries llama.cpp ready built
//     NODE_MODULES=that/node_modules node llama_cpp.mjs MODEL.gguf "PROMPT" 50 [LORA.gguf]
//
// float32 cache, no flash attention, one thread: with an f32 file everything is float32.
import {pathToFileURL} from "node:url";

const {getLlama} = await import(pathToFileURL(`${process.env.NODE_MODULES}/node-llama-cpp/dist/index.js`).href);
const [file, prompt, count, lora] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: 1});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({
    contextSize: 512, sequences: 1, batchSize: 512, flashAttention: false, lora,
    experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"
});
const sequence = context.getSequence();

// Log-probabilities in float64 from raw logits.
function ranked(logits) {
    const pairs = [...logits.entries()].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
    const sum = pairs.reduce((sum, [, logit]) => sum + Math.exp(logit - pairs[0][1]), 0);
    return {token: pairs[0][0], logprob: -Math.log(sum), margin: pairs[0][1] - pairs[1][1]};
}

const promptTokens = model.tokenize(prompt, true);
let next = [...promptTokens];
const steps = [];
for (let step = 0; step < Number(count); step++) {
    const input = next.map((token, at) => at + 1 < next.length ? token : [token, {generateNext: {logits: true, options: {temperature: 0}}}]);
    const output = await sequence.controlledEvaluate(input);
    const best = ranked(output[input.length - 1].next.logits);
    steps.push(best);
    next = [best.token];
}
const description = {architecture: model.fileInfo.metadata.general.architecture, template: model.fileInfo.metadata.tokenizer?.chat_template !== undefined};
console.log(JSON.stringify({prompt: promptTokens, steps, text: model.detokenize(steps.map(({token}) => token)), ...description}));
process.exit(0);
